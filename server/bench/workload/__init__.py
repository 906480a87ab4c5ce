"""Load of a run: the conversations that it sends, and their arrival times."""
