"""One rank: its process, its memory, and the runners that execute steps on its shard. Never starts other ranks."""
