"""How much memory a rank's steps take, and what happens when there is not enough for one."""
