"""What `oarlock …` starts."""
