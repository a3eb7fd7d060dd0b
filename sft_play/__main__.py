"""`python -m sft_play` is `sft-play`."""

from sft_play.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
