# SPDX-License-Identifier: Apache-2.0
"""Weight sync over NCCL with several samplers and several trainers, a GPU for each.

As bench_nccl.py, with the rank 0 of the trainer in this process and everybody else in one of
their own. All communicators are kept between syncs. Variants, in turns, for each number of
receivers that the GPUs allow, up to three:

flat broadcast      all bytes in one buffer, one ncclBroadcast: what the links give
ours                one WeightSender with receivers=
ours, pairwise      one sender for each receiver, one sync after the other, as adapters do

and for one receiver, and for two where there are four GPUs:

1 sender            as above
2 senders           the second joins with half of the bytes

    python benchmarks/bench_nccl_many.py [--model qwen3-0.6b] [--repeats 30]
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import bench_nccl
import common
import shapes
import torch
import torch.distributed as dist

import arctic_rl_c

LIMIT = 120.0
RECEIVERS = 3  # at most


class Rank:
    """What every process has: the weights, a flat buffer, and a group for each broadcast."""

    def __init__(self, model: str, rank: int, world: int, port: int) -> None:
        bench_nccl.join(rank, port, world)
        self.params = bench_nccl.make_model(model, seed=0, device=rank)
        self.nbytes = sum(t.nbytes for t in self.params.values())
        self.flat = torch.empty(self.nbytes // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")
        # Every rank makes every group, also those that it is not in.
        self.groups = [dist.new_group(list(range(size + 1))) for size in range(1, world)]

    def broadcast(self, receivers: int) -> None:
        dist.broadcast(self.flat, 0, group=self.groups[receivers - 1])
        torch.cuda.synchronize()

    def sender(self, **options: Any) -> arctic_rl_c.WeightSender:
        return arctic_rl_c.WeightSender(
            self.params, transport="nccl", keep_mapped=True, timeout=LIMIT, **options
        )


class Worker(Rank):
    """A sampler, or a further rank of the trainer; one method a message."""

    def __init__(self, model: str, rank: int, world: int, port: int) -> None:
        super().__init__(model, rank, world, port)
        self.receivers: dict[str, arctic_rl_c.WeightReceiver] = {}
        self.senders: dict[str, arctic_rl_c.WeightSender] = {}

    def pull(self, key: str, offer: bytes) -> None:
        if key not in self.receivers:
            self.receivers[key] = arctic_rl_c.WeightReceiver(
                self.params, keep_mapped=True, timeout=LIMIT
            )
        self.receivers[key].pull(offer)

    def join(self, key: str, offer: bytes, rank: int) -> None:
        if key not in self.senders:
            self.senders[key] = self.sender()
        self.senders[key].join(offer, rank)

    def spoil(self) -> None:
        for tensor in self.params.values():
            tensor.zero_()
        torch.cuda.synchronize()

    def check(self) -> list[int]:
        return bench_nccl.fingerprint(self.params)

    def close(self) -> None:
        for end in (*self.receivers.values(), *self.senders.values()):
            end.close()


def worker_main(connection: Connection, model: str, rank: int, world: int, port: int) -> None:
    worker = Worker(model, rank, world, port)
    connection.send((True, None))
    while True:
        method, arguments = connection.recv()
        try:
            connection.send((True, getattr(worker, method)(*arguments)))
        except Exception as error:
            connection.send((False, repr(error)))
        if method == "close":
            dist.destroy_process_group()
            return


class Trainer(Rank):
    """Rank 0, which starts the others and tells them what to do."""

    def __init__(self, model: str, world: int) -> None:
        with socket.socket() as listener:  # torch's store takes a number, not a socket
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(1, world):
            ours, theirs = context.Pipe()
            arguments = (theirs, model, rank, world, port)
            process = context.Process(target=worker_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        super().__init__(model, 0, world, port)
        for rank in range(1, world):
            self.answer(rank)
        self.senders: dict[str, arctic_rl_c.WeightSender] = {}

    def start(self, rank: int, method: str, *arguments: Any) -> None:
        self.connections[rank - 1].send((method, arguments))

    def answer(self, rank: int) -> Any:
        assert self.connections[rank - 1].poll(LIMIT), f"rank {rank} does not answer"
        done, value = self.connections[rank - 1].recv()
        assert done, f"rank {rank}: {value}"
        return value

    def ask(self, rank: int, method: str) -> Any:
        self.start(rank, method)
        return self.answer(rank)

    def flat_broadcast(self, receivers: int) -> Callable[[], None]:
        def run() -> None:
            for rank in range(1, receivers + 1):
                self.start(rank, "broadcast", receivers)
            self.broadcast(receivers)
            for rank in range(1, receivers + 1):
                self.answer(rank)

        return run

    def sync(self, senders: int, ranks: list[int]) -> Callable[[], None]:
        """Ranks 0 to senders - 1 to the receivers on `ranks`."""
        key = f"{senders} to {ranks}"
        sender = self.sender(senders=senders, receivers=len(ranks))
        self.senders[key] = sender
        others = [*range(1, senders), *ranks]

        def run() -> None:
            offer = sender.offer()
            for rank in range(1, senders):
                self.start(rank, "join", key, offer, rank)
            for rank in ranks:
                self.start(rank, "pull", key, offer)
            sender.serve()
            for rank in others:
                self.answer(rank)

        return run

    def pairwise(self, receivers: int) -> Callable[[], None]:
        syncs = [self.sync(1, [rank]) for rank in range(1, receivers + 1)]

        def run() -> None:
            for sync in syncs:
                sync()

        return run

    def close(self) -> None:
        for rank in range(1, len(self.connections) + 1):
            self.start(rank, "close")
        for sender in self.senders.values():
            sender.close()
        dist.destroy_process_group()
        for process in self.processes:
            process.join(LIMIT)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(shapes.MODELS))
    args: argparse.Namespace = parser.parse_args()
    world = min(torch.cuda.device_count(), RECEIVERS + 1)
    if world < 3:
        sys.exit("bench_nccl_many needs three GPUs or more")
    trainer = Trainer(args.model, world)
    wanted = bench_nccl.fingerprint(trainer.params)

    def checked(ranks: list[int], run: Callable[[], None]) -> Callable[[], None]:
        for rank in ranks:
            trainer.ask(rank, "spoil")
        run()
        for rank in ranks:
            assert trainer.ask(rank, "check") == wanted, f"rank {rank}: the weights differ"
        return run

    fan_out: dict[str, Callable[[], None]] = {}
    for count in range(1, world):
        ranks = list(range(1, count + 1))
        fan_out[f"flat broadcast to {count}"] = trainer.flat_broadcast(count)
        fan_out[f"ours to {count}"] = checked(ranks, trainer.sync(1, ranks))
        if count > 1:
            fan_out[f"ours, pairwise to {count}"] = checked(ranks, trainer.pairwise(count))
    shares: dict[str, Callable[[], None]] = {}
    for ranks in [[2], [2, 3]][: world - 2]:
        for senders in (1, 2):
            label = f"{senders} sender{'s' * (senders > 1)}, {len(ranks)} to receive"
            shares[label] = checked(ranks, trainer.sync(senders, ranks))
    size = f"{args.model}: {len(trainer.params)} tensors, {trainer.nbytes / 1e9:.2f} GB"
    sections = [
        common.Section(
            f"{size}; one sender", common.compare(fan_out, args, nbytes=trainer.nbytes), "ours to 1"
        ),
        common.Section(
            f"{size}; shared",
            common.compare(shares, args, nbytes=trainer.nbytes),
            "1 sender, 1 to receive",
            facts={"nccl": str(arctic_rl_c.show_config(as_dict=True)["nccl"])},
        ),
    ]
    common.report("nccl-many", sections, args, gpu=True)
    trainer.close()


if __name__ == "__main__":
    sys.exit(main())
