import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_roots import cifar10, idx

from dg_lightning import datamodules
from dg_lightning.datamodules import CIFAR10DataModule, MNISTDataModule
from dg_lightning.datamodules._files import Download, DownloadError, fetch, unpack

CONTENT = b"some bytes" * 1000


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT, and breaks off in the middle of /broken."""

    def do_GET(self) -> None:
        if self.path == "/nothing":
            self.send_error(404)
            return
        body = self.server.archive if self.path == "/archive.tar" else CONTENT  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/broken" else body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def address(server: Any, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{path}"


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def test_a_download_is_checked_and_put_in_its_place(server: Any, tmp_path: Path) -> None:
    fetch(Download(address(server, "file"), md5(CONTENT), "a/b/file"), tmp_path)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("path", "digest", "error", "reason"),
    [
        ("file", "md5:0", ValueError, "is damaged: its md5 should be 0, got"),
        ("broken", md5(CONTENT), ValueError, "is damaged: its md5 should be"),
        ("nothing", md5(CONTENT), DownloadError, "Not Found"),
    ],
)
def test_a_failed_download_leaves_nothing(
    server: Any, tmp_path: Path, path: str, digest: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        fetch(Download(address(server, path), digest, "a/file"), tmp_path)
    assert list((tmp_path / "a").iterdir()) == []


def test_what_a_killed_download_left_is_cleared_away(server: Any, tmp_path: Path) -> None:
    (tmp_path / "a" / ".file.download").mkdir(parents=True)
    (tmp_path / "a" / ".file.download" / "file").write_bytes(CONTENT[:10])
    fetch(Download(address(server, "file"), md5(CONTENT), "a/file"), tmp_path)
    assert (tmp_path / "a" / "file").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_an_incomplete_folder_is_named_and_not_downloaded_over(tmp_path: Path) -> None:
    cifar10(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match=r"cannot find .*/test_batch; remove .*-py"):
        CIFAR10DataModule(root=str(tmp_path)).prepare_data()  # a download would reach for the net
    assert len(list((tmp_path / "cifar-10-batches-py").iterdir())) == 5


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_an_archive_becomes_its_folder_and_a_folder_that_is_there_stays(
    server: Any, tmp_path: Path
) -> None:
    server.archive = tar_of({"top/a": b"1", "top/below/b": b"2"})
    download = Download(address(server, "archive.tar"), md5(server.archive), "x/data", "top")
    fetch(download, tmp_path)
    assert (tmp_path / "x" / "data" / "below" / "b").read_bytes() == b"2"
    fetch(download, tmp_path)  # as the slower one of two processes
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["data"]


@pytest.mark.parametrize("name", ["../outside", "top/../../outside"])
def test_an_archive_that_reaches_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.tar").write_bytes(tar_of({"good": b"", name: b"bad"}))
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(name, "bad")
    for packed in ("bad.tar", "bad.zip"):
        with pytest.raises(ValueError, match=f"{packed} is not safe to unpack"):
            unpack(tmp_path / packed, tmp_path / "inside")
    assert not (tmp_path / "outside").exists()


def test_an_absolute_path_in_an_archive_stays_inside_or_is_refused(tmp_path: Path) -> None:
    name = str(tmp_path / "outside")
    (tmp_path / "bad.tar").write_bytes(tar_of({name: b"bad"}))
    unpack(tmp_path / "bad.tar", tmp_path / "inside")  # the standard library makes it relative
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(name, "bad")
    with pytest.raises(ValueError, match=r"bad.zip is not safe to unpack"):
        unpack(tmp_path / "bad.zip", tmp_path / "inside")
    assert not (tmp_path / "outside").exists()


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "../../etc"
        archive.addfile(entry)
    with pytest.raises(ValueError, match="not safe to unpack"):
        unpack(tmp_path / "link.tar", tmp_path / "inside")


def test_without_a_network_one_line_says_what_is_missing(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = tuple(
        Download(address(server, "nothing"), d.digest, d.target) for d in MNISTDataModule.downloads
    )
    monkeypatch.setattr(MNISTDataModule, "downloads", offline)
    data = MNISTDataModule(root=str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError) as caught:
        data.prepare_data()
    message = str(caught.value)
    assert "\n" not in message
    for part in ("train-images-idx3-ubyte.gz", "MNIST/raw", offline[0].url, "DG_DATA", "Not Found"):
        assert part in message
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".download.lock"]
    with pytest.raises(FileNotFoundError, match=r"cannot find .*/MNIST/raw/train-images"):
        data.setup("fit")  # does not try to download: that is for one process


def test_what_is_there_is_not_downloaded_again(server: Any, tmp_path: Path) -> None:
    # The server has other bytes for every file, so a download would fail its check.
    idx(tmp_path / "MNIST" / "raw", packed=True)
    MNISTDataModule(root=str(tmp_path)).prepare_data()


def test_a_root_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=r"cannot find .*\(Not a directory"):
        MNISTDataModule(root=str(tmp_path / "file")).prepare_data()


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "text"])
def test_an_archive_that_is_damaged_is_one_line(kind: str, damage: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a", CONTENT)
    packed = {"zip": buffer.getvalue(), "tar": tar_of({"a": CONTENT})}.get(kind)
    packed = gzip.compress(tar_of({"a": CONTENT})) if packed is None else packed
    content = {
        "cut": packed[: len(packed) // 2],
        "changed": packed[:35] + b"\xff" * 25 + packed[60:],
        "text": b"no archive",
    }[damage]
    (tmp_path / f"bad.{kind}").write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.{kind}") as caught:
        unpack(tmp_path / f"bad.{kind}", tmp_path / "inside")
    assert "\n" not in str(caught.value)


WITH_DOWNLOADS = [
    getattr(datamodules, name)
    for name in datamodules.__all__
    if getattr(getattr(datamodules, name), "downloads", ())
]


@pytest.mark.parametrize("kind", WITH_DOWNLOADS)
def test_downloads_are_encrypted_and_a_weak_checksum_is_said(kind: Any) -> None:
    security = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for download in kind.downloads:
        assert download.url.startswith("https://"), download.url
        if not download.digest.startswith("sha256:"):  # the source publishes no better one
            assert any(kind.__name__ in line and "MD5" in line for line in security.splitlines())
