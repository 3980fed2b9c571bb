"""check: what scales a checkpoint holds, what looks wrong with them, and what a server makes of them."""
