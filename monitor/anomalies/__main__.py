"""``python -m monitor.anomalies`` is ``monitor-rank-anomalies``."""

from monitor.anomalies.ranking.cli import app

if __name__ == "__main__":
    app(prog_name="monitor-rank-anomalies")
