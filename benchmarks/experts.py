"""Compare a training step of layers of experts with the reference: the same ``MoE`` layers on four gloo ranks.

    python benchmarks/experts.py --rounds 5

Both packages alternate within a round. Prints the medians of the rounds, and the ratio; see README.md for the
reference's own environment.
"""

from peers.pair import compare

SIZES = {"experts": 8, "ep": 4, "width": 256, "inner": 1024, "layers": 4, "batch": 4, "length": 128, "steps": 13}
CASES = {f"top-{k}, ZeRO-{stage}": {**SIZES, "k": k, "stage": stage} for stage in (1, 2) for k in (1, 2)}

if __name__ == "__main__":
    compare("layers of experts", "expert_rank.py", CASES, 4, __doc__)
