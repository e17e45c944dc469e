"""Draws kill.png: two real runs, one with `kill -9`, and their hashes. Run: python docs/kill_picture.py"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

PAPER, INK, DIM, PROMPT, LOUD = "#16181d", "#d8dee9", "#7b8394", "#88c0d0", "#ebcb8b"
SIZE, MARGIN = 26, 32


def main() -> None:
    lines: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        run("lockstep train --name calm -o train.epochs=3", folder, lines)
        run("lockstep train --name hurt -o train.epochs=3 --workers 4", folder, lines, kills=True)
        run("lockstep verify calm hurt", folder, lines)
    draw(lines, Path(__file__).with_name("kill.png"))


def run(command: str, folder: str, lines: list[tuple[str, str]], kills: bool = False) -> None:
    """Run a command, keep what it prints, and perhaps kill one of its workers half way."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()], cwd=folder, text=True, stdout=subprocess.PIPE
    )
    lines.append((f"$ {command}", PROMPT))
    assert process.stdout
    for line in map(str.rstrip, process.stdout):
        if line.startswith(("epoch", "worker", "weights", "identical")):
            shown = re.sub(r"  [\d,]+ img/s.*", "", line)  # this machine may be busy
            lines.append((shown, INK if line.startswith("epoch") else LOUD))
        if kills and line.startswith("epoch 1/"):
            worker = find_worker("lockstep 2", folder)
            lines.append((f"        $ kill -9 {worker}           # in another terminal", PROMPT))
            os.kill(worker, signal.SIGKILL)
    assert process.wait() == 0
    lines.append(("", INK))


def find_worker(name: str, folder: str) -> int:
    """The process of this name in a folder; the kernel knows a name by 15 letters."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        if path.read_text().strip() == name and (path.parent / "cwd").resolve() == Path(folder).resolve():
            return int(path.parent.name)
    raise SystemExit(f"no process is named {name}")


def draw(lines: list[tuple[str, str]], path: Path) -> None:
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(fonts / "DejaVuSansMono.ttf"), SIZE)
    wide = max(int(font.getlength(text)) for text, _ in lines)
    high = round(SIZE * 1.45)
    picture = Image.new("RGB", (wide + 2 * MARGIN, high * (len(lines) - 1) + 2 * MARGIN), PAPER)
    pen = ImageDraw.Draw(picture)
    for number, (text, color) in enumerate(lines):
        pen.text((MARGIN, MARGIN + number * high), text, font=font, fill=color)
    picture.save(path)


if __name__ == "__main__":
    main()
