"""Certificates for tests, made by the commands that docs/jobs.md has."""

import re
import shutil
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "jobs.md"
OPENSSL = shutil.which("openssl")


def make_certificates(folder, host="127.0.0.1", days=365):
    """A folder with ca.crt, tls.crt and tls.key, for a coordinator at an address."""
    folder.mkdir()
    commands = re.findall(r"^openssl (?:req|x509) .*?[^\\]\n", PAGE.read_text(), re.M | re.S)
    assert len(commands) == 3, commands
    for command in commands:
        told = command.replace("DNS:HOST", f"IP:{host}").replace("-days 365 ", f"-days {days} ")
        subprocess.run(["bash", "-c", told], cwd=folder, check=True, capture_output=True)
    return folder
