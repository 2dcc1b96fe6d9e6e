"""How soon an elastic job trains again after a rank was killed.

    python benchmarks/elastic.py [--ranks 4] [--kills 5] [--every 10]
    python benchmarks/elastic.py --hosts [--kills 3]

Kills a random rank and prints the seconds until the new ranks are started, and until they have made their first update;
most of it is Python and torch being imported. With --hosts, of two hosts (network namespaces; it needs root) with one
rank each the second is killed whole: until the first goes on alone, which begins with the 10 s that it may be silent.
"""

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))


def _newest_round(folder: Path) -> tuple[int, int]:
    """The newest round that has made an update, and how many updates it has made."""
    rounds = [int(file.name.split(".")[1]) for file in (folder / "record").glob("[0-9]*.*.*")]
    newest = max(rounds, default=-1)
    return newest, rounds.count(newest)


def restarts(ranks: int, kills: int, every: int) -> None:
    """Kill ``kills`` ranks, one after the other, and print how long each restart took."""
    from tests.harness.elastic import ElasticJob

    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        flags = ("--num_gpus", str(ranks), "--min_ranks", "1", "--max_restarts", str(kills))
        job = ElasticJob(folder, *flags, words=("--steps", "100000", "--pause", "0.05", "--every", str(every)))
        try:
            started, trained = [], []
            for number in range(kills):
                newest, _ = _newest_round(folder)
                job.until(lambda: _newest_round(folder)[1] > 4 * ranks, "updates")
                newest, _ = _newest_round(folder)
                alive = job.pids()
                victim = chance.choice(sorted(alive))
                killed = time.monotonic()
                job.kill(victim)
                job.until(lambda old=alive: (now := job.pids()) and not set(now.values()) & set(old.values()), "ranks")
                started.append(time.monotonic() - killed)
                job.until(lambda old=newest: _newest_round(folder)[0] > old, "an update")
                trained.append(time.monotonic() - killed)
                print(
                    f"kill {number + 1}: rank {victim} of {len(alive)}; {len(job.pids())} ranks started after "
                    f"{started[-1]:.1f} s, first update after {trained[-1]:.1f} s",
                    flush=True,
                )
            sizes = re.findall(r"round \d+: (\d+) ranks", job.out.read_text())
            print(f"sizes {', '.join([str(ranks), *sizes])}")
            print(
                f"first update after a kill: median {statistics.median(trained):.1f} s, most {max(trained):.1f} s "
                f"(ranks started after {statistics.median(started):.1f} s)"
            )
        finally:
            job.process.terminate()
            job.process.wait()


def lost_hosts(times: int, every: int) -> None:
    """Lose a host of two, ``times`` times in jobs of their own, and print how long it took to go on."""
    from tests.dist.test_launcher_hosts import Hosts, remove_left_over
    from tests.harness.elastic import ElasticJob

    remove_left_over()
    seconds = []
    with tempfile.TemporaryDirectory() as place:
        hosts = Hosts(Path(place), sys.executable)
        try:
            hosts.up()
            for number in range(times):
                where = ("--master_addr", hosts.addresses["a"], "--master_port", str(29560 + number), "--num_gpus", "1")
                flags = ("--min_elastic_nodes", "1", "--max_elastic_nodes", "2", *where)
                words = ("--steps", "100000", "--pause", "0.05", "--every", str(every))
                folder = Path(place) / f"job{number}"
                jobs = [
                    ElasticJob(
                        folder,
                        *(*flags, "--node_rank", str(node)),
                        words=words,
                        enter=("ip", "netns", "exec", hosts.prefix + host),
                        name=host,
                    )
                    for node, host in enumerate("ab")
                ]
                try:
                    jobs[0].until(lambda at=folder: [*(at / "record").glob("*.*.1")], "an update of both")
                    newest, _ = _newest_round(folder)
                    killed = time.monotonic()
                    hosts.kill("b")
                    jobs[0].until(lambda at=folder, old=newest: _newest_round(at)[0] > old, "an update alone")
                    seconds.append(time.monotonic() - killed)
                    print(
                        f"loss {number + 1}: first update after {seconds[-1]:.1f} s, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
                finally:
                    for job in jobs:
                        job.process.kill()
                        job.process.wait()
                    hosts.kill("a")
        finally:
            hosts.down()
    print(
        f"first update after the loss of a host: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="updates between two checkpoints")
    parser.add_argument("--hosts", action="store_true", help="lose a host of two instead")
    given = parser.parse_args()
    if given.hosts:
        lost_hosts(given.kills, given.every)
        return
    restarts(given.ranks, given.kills, given.every)


if __name__ == "__main__":
    main()
