"""One rank: its process, the model runner, and the executors that start and drive ranks."""
