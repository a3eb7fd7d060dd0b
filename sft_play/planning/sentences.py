"""What a plan's batch looks like, in sentences for people."""

from sft_play.plan import Plan
from sft_play.units import counted


def batch_sentence(plan: Plan) -> str:
    """The equation of the effective batch for people."""
    words = "tokens" if plan.packing else "sequences"
    return (
        f"effective batch {plan.effective_batch_size:,} {words} = micro-batch {plan.micro_batch_size:,} x "
        f"accumulation {plan.gradient_accumulation_steps} x {counted(plan.world_size, 'process')}"
    )


def dealing_sentence(plan: Plan) -> str:
    """What a micro-batch looks like, for people."""
    tokens = f"at most {plan.micro_batch_tokens:,} tokens in a micro-batch"
    if plan.padding_free:
        return f"{tokens}: rows joined end to end, none padded"
    return f"{tokens}: rows of similar length, padded to the longest"
