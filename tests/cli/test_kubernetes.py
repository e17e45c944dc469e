"""The Kubernetes file of the examples: whole by the schemas of its kinds, and of one piece with the flags."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from lockstep.cli.main import make_parser

HERE = Path(__file__).parent
FILE = HERE.parents[1] / "examples" / "kubernetes" / "train.yaml"
SCHEMA = json.loads((HERE / "kubernetes.json").read_text())  # what of the published one these files need
TYPES = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
OBJECTS = {found["kind"]: found for found in yaml.safe_load_all(FILE.read_text())}
JOB = OBJECTS["Job"]
POD = JOB["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def faults(value, schema, path):
    """What of a value is not as its schema wants it."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema:
        every = [list(faults(value, choice, path)) for choice in schema["oneOf"]]
        yield from [] if [] in every else every[0]
        return
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", list(TYPES))
    if not any(type(value) in TYPES[kind] for kind in kinds):
        yield f"{path}: {value!r} is no {' or '.join(kinds)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not among {schema['enum']}"
    elif isinstance(value, dict):
        yield from (f"{path}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        others = schema.get("additionalProperties", {})
        for key, inner in value.items():
            if key in schema.get("properties", {}) or others:
                yield from faults(inner, schema.get("properties", {}).get(key, others), f"{path}.{key}")
            elif others is False:
                yield f"{path}: there is no {key}"
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from faults(inner, schema.get("items", {}), f"{path}[{number}]")


def check(found):
    return list(faults(found, SCHEMA["definitions"][SCHEMA["kinds"][found["kind"]]], found["kind"]))


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_object_is_as_its_schema_wants_it(kind):
    assert not check(OBJECTS[kind])


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda job: job["spec"].update(completion=4), "Job.spec: there is no completion"),
        (lambda job: job["spec"].update(completions="4"), "Job.spec.completions: '4' is no integer or null"),
        (lambda job: job["spec"].pop("template"), "Job.spec: template is missing"),
        (
            lambda job: job["spec"]["template"]["spec"]["containers"][0].update(volumeMount=[]),
            "Job.spec.template.spec.containers[0]: there is no volumeMount",
        ),
    ],
)
def test_the_schema_finds_what_is_wrong(spoil, fault):
    job = copy.deepcopy(JOB)
    spoil(job)
    assert fault in check(job)


def test_the_command_is_one_of_ours_and_its_pieces_are_of_one_piece():
    program, *words = CONTAINER["command"] + CONTAINER["args"]
    options = make_parser().parse_args(words)
    assert program == "lockstep" and options.resume == "auto"
    name, service, port = JOB["metadata"]["name"], OBJECTS["Service"], CONTAINER["ports"][0]["containerPort"]
    assert options.rdzv == f"{name}-0.{POD['subdomain']}:{port}"
    assert service["metadata"]["name"] == POD["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["ports"][0]["port"] == port
    assert JOB["spec"]["completionMode"] == "Indexed" and options.nodes == f"1:{JOB['spec']['completions']}"
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert CONTAINER["env"][0]["name"] == "LOCKSTEP_TOKEN"
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in POD["volumes"]}
    assert {str(options.runs_dir), str(options.tls)} < set(mounts)


def test_pods_that_saved_are_made_again_and_bad_input_is_not():
    codes = {
        code: rule["action"]
        for rule in JOB["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert codes == {2: "FailJob", 143: "Ignore"} and POD["restartPolicy"] == "Never"
    assert POD["terminationGracePeriodSeconds"] >= 60
