"""A plan to start from."""

from tests.plans import plan_of

PLAN = plan_of(
    micro_batch_size=4, gradient_accumulation_steps=2, effective_batch_size=8, world_size=1, engine="none", max_seq_len=64,
    packing=False, activations="keep", mixed_precision="no", dtype="float32", attention="sdpa", learning_rate=1e-4,
    steps_per_epoch=2, total_steps=2, device="cpu",
)  # fmt: skip
