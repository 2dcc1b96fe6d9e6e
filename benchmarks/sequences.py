"""Compare a training step of a cut sequence with the reference: the same ``DistributedAttention`` on two gloo ranks.

    python benchmarks/sequences.py --rounds 5

Both packages alternate within a round. Prints the medians of the rounds, and the ratio; see README.md for the
reference's own environment.
"""

from peers.pair import compare

SIZES = {"width": 256, "heads": 8, "layers": 4, "batch": 1, "length": 2048, "steps": 11}
CASES = {f"ZeRO-{stage}": {**SIZES, "stage": stage} for stage in (1, 3)}

if __name__ == "__main__":
    compare("sequence over two ranks", "sequence_rank.py", CASES, 2, __doc__)
