"""Take prepared data to a machine that receives a limited number of bytes per call, and put it together there.

    python lab/carry_data.py pack data/mix build/mix --bytes 44e6     writes build/mix/1, build/mix/2, ...
    python lab/carry_data.py unpack FOLDER ... --out data/mix         reads all of them, in any order

Tokens are 16-bit numbers. They are cut into chunks, and each chunk is compressed on its own, so that all cores work: the 271 MB of the
long study become 92 MB. Every chunk has its checksum in its name. `unpack` writes nothing that it has not checked.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CHUNK = 1 << 24
# Positions and contexts of two bytes.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]


def pack(source: Path, out: Path, limit: int) -> list[Path]:
    """Compress every file of a folder in chunks, and spread the chunks over folders.

    Args:
        source: folder of prepared data.
        out: folder for the numbered folders; it must not exist.
        limit: the most bytes of one numbered folder.

    Returns:
        The numbered folders.
    """
    files = sorted(path for path in source.iterdir() if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source} has no files")
    out.mkdir(parents=True)
    chunks = [(path, start) for path in files for start in range(0, max(1, path.stat().st_size), CHUNK)]
    with ProcessPoolExecutor() as pool:
        packed = list(pool.map(_pack_chunk, chunks, [out] * len(chunks), [len(chunks)] * len(chunks)))
    folders: list[Path] = []
    room = 0
    for chunk in packed:
        size = chunk.stat().st_size
        if size > limit:
            raise ValueError(f"a chunk takes {size:,} bytes, and a folder may have {limit:,}")
        if size > room:
            folders.append(out / str(len(folders) + 1))
            folders[-1].mkdir()
            room = limit
        chunk.rename(folders[-1] / chunk.name)
        room -= size
    return folders


def _pack_chunk(place: tuple[Path, int], out: Path, count: int) -> Path:
    """Write one chunk of `count` to the file NAME@START@COUNT@CHECKSUM."""
    path, start = place
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(CHUNK)
    chunk = out / f"{path.name}@{start}@{count}@{hashlib.sha256(data).hexdigest()[:16]}"
    chunk.write_bytes(lzma.compress(data, filters=FILTERS))
    return chunk


def unpack(folders: Iterable[Path], out: Path) -> None:
    """Put the chunks of all folders together.

    Args:
        folders: what `pack` returned, in any order.
        out: folder for the data; it must not exist.

    Raises:
        ValueError: a chunk is damaged or missing, or a file is no chunk.
    """
    paths = [path for folder in folders for path in folder.iterdir()]
    if foreign := [path for path in paths if path.name.count("@") != 3]:
        raise ValueError(f"{foreign[0]} is no chunk that pack wrote")
    chunks = sorted(paths, key=lambda p: (_name(p), int(p.name.split("@")[1])))
    count = int(chunks[0].name.split("@")[2]) if chunks else 0
    if len({chunk.name for chunk in chunks}) < max(count, 1):
        raise ValueError(f"parts are missing: {len(chunks)} of {count} chunks are here")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as place, ProcessPoolExecutor() as pool:
        for chunk, data in zip(chunks, pool.map(_unpack_chunk, chunks), strict=True):
            with open(Path(place) / _name(chunk), "ab") as file:
                file.write(data)
        shutil.copytree(place, out)


def _name(chunk: Path) -> str:
    return chunk.name.split("@")[0]


def _unpack_chunk(chunk: Path) -> bytes:
    """Read one chunk and check it."""
    data = lzma.decompress(chunk.read_bytes())
    if hashlib.sha256(data).hexdigest()[:16] != chunk.name.split("@")[3]:
        raise ValueError(f"{chunk} is damaged")
    return data


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="compress a folder of prepared data")
    packing.add_argument("source", type=Path, help="folder of prepared data")
    packing.add_argument("out", type=Path, help="new folder for the parts")
    packing.add_argument("--bytes", type=float, default=44e6, help="the most bytes of one part")
    unpacking = commands.add_parser("unpack", help="put the parts together")
    unpacking.add_argument("folders", type=Path, nargs="+", help="all parts")
    unpacking.add_argument("--out", type=Path, required=True, help="new folder for the data")
    options = parser.parse_args()
    try:
        if options.command == "pack":
            for folder in pack(options.source, options.out, int(options.bytes)):
                print(folder)
        else:
            unpack(options.folders, options.out)
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise SystemExit(f"carry_data: {error}") from None


if __name__ == "__main__":
    main()
