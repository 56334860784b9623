"""``forward`` with what reads it in production: Debian's Prometheus server, and a receiver of OTLP."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from test_what_is_passed_on import STEPS, base, free_port, in_files, run, trained

__all__ = ["base"]

PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 60.0


class Server:
    """A Prometheus server that reads one process ten times a second."""

    def __init__(self, target: int, folder: Path) -> None:
        job = {"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        limits = {"scrape_interval": "100ms", "scrape_timeout": "100ms"}
        (folder / "prometheus.yml").write_text(json.dumps({"global": limits, "scrape_configs": [job]}))
        self._port = free_port()
        where = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        assert PROMETHEUS is not None
        command = [PROMETHEUS, *where, f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=error"]
        self.process = subprocess.Popen(command)

    def samples(self, query: str) -> dict[str, float]:
        """Now, by the name of the tensor."""
        address = f"http://127.0.0.1:{self._port}/api/v1/query?{urlencode({'query': query})}"
        try:
            answer = json.loads(urllib.request.urlopen(address, timeout=5).read())
        except OSError:  # it is starting
            return {}
        return {one["metric"].get("name", ""): float(one["value"][1]) for one in answer["data"]["result"]}

    def wait_for(self, step: int) -> None:
        """Until it has read a step."""
        ends = time.monotonic() + PATIENCE_S
        while self.samples("trainermon_step") != {"": step}:
            assert time.monotonic() < ends, f"step {step} was not read"
            time.sleep(0.05)


@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus server is installed (Debian: apt-get install prometheus)")
def test_a_prometheus_server_reads_each_step(base: Path, tmp_path: Path) -> None:
    target, read = free_port(), dict[tuple[int, str], float]()
    server = Server(target, tmp_path)

    def look(_: Any, step: int) -> None:
        server.wait_for(step)
        read.update({(step, name): value for name, value in server.samples('trainermon_value{kind="grad_reduced"}').items()})

    try:
        forward = {"to": "prometheus", "port": target, "kinds": ["grad_reduced"]}
        trained(lambda one: one.forward_to(look, most=1), forward=forward)
    finally:
        server.process.terminate()
        server.process.wait()
    assert read == pytest.approx(in_files(base, "grad_reduced", "norm"))


EXPORTING = """
import sys
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{PORT}/v1/metrics")
provider = MeterProvider(metric_readers=[PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)])
metrics.set_meter_provider(provider)
from test_what_is_passed_on import trained

def prepare(one):
    one.forward_to(lambda numbers, step: provider.force_flush(), most=1)

trained(prepare, forward={"to": "opentelemetry", "kinds": ["grad_reduced"]})
provider.shutdown()
"""


@pytest.fixture
def received() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a receiver of OTLP over HTTP, and what it has received."""
    messages: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, messages
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_exporter_of_opentelemetry_sends_each_step(received: tuple[int, list[bytes]], tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    port, messages = received
    run(EXPORTING.replace("{PORT}", str(port)), tmp_path)
    found: dict[tuple[int, str], float] = {}
    for message in messages:
        resources = ExportMetricsServiceRequest.FromString(message).resource_metrics
        scopes = [scope for one in resources for scope in one.scope_metrics]
        points = {metric.name: metric.gauge.data_points for scope in scopes for metric in scope.metrics}
        step = int(points["trainermon.step"][0].as_int or points["trainermon.step"][0].as_double)
        for point in points["trainermon.value"]:
            (name,) = (one.value.string_value for one in point.attributes if one.key == "name")
            found[step, name] = point.as_double
    assert {step for step, _ in found} == set(range(STEPS))
    assert found == pytest.approx(in_files(tmp_path / "out", "grad_reduced", "norm"))
