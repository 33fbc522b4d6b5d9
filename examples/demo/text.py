"""Inputs of the demo: the path of the checkpoint, and the bytes to evaluate on."""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT = Path(__file__).parents[1] / "tiny_moe" / "model"


@dataclass(frozen=True)
class Text:
    """Bytes to evaluate on, and a line that describes them."""

    data: bytes
    source: str


def find_model(given: str | None) -> Path:
    """Return the checkpoint's folder: the given one, or the one beside the demo.

    Raises ValueError if it or one of its files is missing.
    """
    folder = CHECKPOINT if given is None else Path(given)
    if not folder.is_dir():
        raise ValueError(f"--model: expected a folder with a checkpoint, found none at {folder}")
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"--model: expected {name} in {folder}, there is none")
    return folder


def read_text(path: str | None, model: Path, num_bytes: int) -> Text:
    """Read the first num_bytes of a file; by default, of files outside the checkpoint's training data.

    Those are modules of the Python standard library, read from the running Python: `heldout.json` in the checkpoint's
    folder names them, with the digests of the version that training measured on.
    """
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"--text: expected a file, there is none at {path}")
        return Text(_enough(file.read_bytes()[:num_bytes], f"--text {path}"), str(path))
    manifest = model.parent / "heldout.json"
    if not manifest.is_file():
        raise ValueError(f"--text: expected a file, since the held-out list {manifest} isn't there")
    return _read_heldout(json.loads(manifest.read_text()), num_bytes)


def _read_heldout(manifest: dict, num_bytes: int) -> Text:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    entries = [entry for entry in manifest["files"] if (stdlib / entry["path"]).is_file()]
    if not entries:
        raise ValueError(f"--text: expected a file, since none of the held-out modules is in {stdlib}")
    parts, same = [], 0
    for entry in entries:
        data = (stdlib / entry["path"]).read_bytes()
        same += hashlib.sha256(data).hexdigest() == entry["sha256"]
        parts.append(data[: -(-num_bytes // len(entries))])  # a part of each, so that all kinds of code are included
    version = manifest.get("python", "another Python")
    note = f"as in training's Python {version}" if same == len(entries) else f"{same} unchanged since Python {version}"
    source = f"{len(entries)} held-out modules of this Python's standard library, {note}"
    return Text(_enough(b"".join(parts)[:num_bytes], "the held-out text"), source)


def _enough(data: bytes, name: str) -> bytes:
    if len(data) < 2:
        raise ValueError(f"{name}: expected at least 2 bytes, got {len(data)}")
    return data
