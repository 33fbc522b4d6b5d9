"""Files of safetensors opened lazily: headers first, then only the tensors, or rows of them, that are asked for."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from envoi.check import dtype_name

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
INDEX = "*.safetensors.index.json"
FIRST_INDEX = "model.safetensors.index.json"  # which other libraries read where there are several


class Shards:
    """Tensors of a checkpoint by name. A context manager: files are opened when first needed, and closed at its end.

    path: a folder with an index and its shards, or with files of safetensors; or one such file; or a list of them.
    Raises ValueError that names the file, and the tensor if there is one, what was expected and what came.
    """

    def __init__(self, path: str | Path | Sequence[str]):
        files = [] if isinstance(path, (str, Path)) else [Path(file) for file in path]
        self.path = files[0].parent if files else Path(path)  # pyright: ignore[reportArgumentType]
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self.file_of = self._by_headers(files) or self._find()

    def __enter__(self) -> "Shards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def _find(self) -> dict[str, Path]:
        """Return the file of each tensor, by the index if there is one, else by the files' headers."""
        if self.path.is_file():
            return dict.fromkeys(self._names(self.path), self.path)
        if not self.path.is_dir():
            raise ValueError(f"path: expected a checkpoint's folder or a file of safetensors, got {self.path}")
        indices, files = sorted(self.path.glob(INDEX)), sorted(self.path.glob("*.safetensors"))
        indices = [index for index in indices if index.name == FIRST_INDEX] or indices
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise ValueError(f"{self.path}: expected one {INDEX}, got {names}")
        if indices:
            return {name: self.path / file for name, file in _weight_map(indices[0]).items()}
        if not files:
            raise ValueError(f"{self.path}: expected files of safetensors, got none")
        return self._by_headers(files)

    def _by_headers(self, files: Sequence[Path]) -> dict[str, Path]:
        """Return the file of each tensor. Raises ValueError for one that is in several, as in shards of ranks."""
        file_of: dict[str, Path] = {}
        for file in files:
            for name in self._names(file):
                if name in file_of:
                    raise ValueError(
                        f"{file}: {name}: expected each tensor in one file, got one that is in {file_of[name]} too"
                    )
                file_of[name] = file
        return file_of

    def check(self) -> None:
        """Open every file. Raises ValueError for one that is truncated, or isn't there."""
        for file in dict.fromkeys(self.file_of.values()):
            self._handle(file)

    def _names(self, file: Path) -> list[str]:
        return list(self._handle(file).keys())

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            import safetensors

            if not file.is_file():
                raise ValueError(f"{file}: expected a file of safetensors, got no such file, or a link to none")
            try:
                self._open[file] = self._stack.enter_context(safetensors.safe_open(file, framework="pt"))
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{file}: expected a whole file of safetensors, got one of {file.stat().st_size} bytes that can't "
                    f"be read: {error}"
                ) from None
        return self._open[file]

    def _slice(self, name: str, why: str) -> Any:
        if name not in self.file_of:
            raise ValueError(f"{self.path}: {name}: expected a tensor of this name{why and f' ({why})'}, got none")
        file = self.file_of[name]
        handle = self._handle(file)
        try:
            return handle.get_slice(name)
        except Exception as error:  # safetensors has no narrower type for it
            raise ValueError(f"{file}: {name}: expected this tensor, as the index says, got none: {error}") from None

    def header(self, name: str, why: str = "") -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Return a tensor's dtype, None if torch has none for it, and shape, without reading it."""
        part = self._slice(name, why)
        return DTYPES.get(part.get_dtype()), tuple(part.get_shape())

    def expect(
        self, name: str, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]], why: str = ""
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor that must have one of those dtypes and shapes. Reads headers only."""
        dtype, shape = self.header(name, why)
        if dtype is None or dtype not in dtypes or (shapes and shape not in shapes):
            wanted = " or ".join(map(dtype_name, dtypes))
            sizes = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
            came = self._slice(name, why).get_dtype() if dtype is None else dtype_name(dtype)
            file = self.file_of[name]
            raise ValueError(f"{file}: {name}: expected {wanted} {sizes or '[..]'}, got {came} {list(shape)}")
        return dtype, shape

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU."""
        self._slice(name, "")
        return self._handle(self.file_of[name]).get_tensor(name)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows first : last of a tensor, on the CPU, without reading the others."""
        return self._slice(name, "")[first:last]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: expected JSON with a weight_map, got a file without: {error!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{index}: expected a weight_map from tensors to files, got {type(found).__name__}")
    for name, file in found.items():
        if not isinstance(file, str):
            raise ValueError(f"{index}: {name}: expected a weight_map with the name of its file, got {file!r}")
    return found
