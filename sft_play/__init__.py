"""SFT-Play: fits supervised fine-tuning of an LLM onto the GPUs you have, and explains how."""

__version__ = "0.2.0"
