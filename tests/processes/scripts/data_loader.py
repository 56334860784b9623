"""Trains on what the forked workers of a data loader compute with polars and pyarrow."""

from __future__ import annotations

import io

import torch
from small_run import monitored
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Table(Dataset[torch.Tensor]):
    """Rows that are computed by libraries which the monitor may be using, too."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        import polars
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv

        text = io.BytesIO()
        pyarrow.csv.write_csv(pyarrow.table({"x": [index / 64 + i for i in range(100)]}), text)
        frame = polars.read_csv(text.getvalue()).lazy().filter(polars.col("x") > 50).sort("x", descending=True).collect()
        total = pyarrow.compute.sum(pyarrow.array(frame["x"].to_list())).as_py()
        return torch.tensor([float(index), total])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = monitored(model, optimizer)
    step = 0
    for _ in range(2):
        for batch in DataLoader(Table(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork", timeout=60):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            print(f"step {step} {loss.item().hex()}", flush=True)
            step += 1
            if step == 4 and monitor is not None:
                monitor.generate_wgrad_metrics()  # from here on the writer has written: Arrow is loaded and in use


main()
