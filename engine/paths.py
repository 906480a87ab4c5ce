"""Home directory, `~` in paths, and the directories of caches. Re-exports the workers' functions."""

from oarlock.workers.paths import cache_home, exists, expand, home, hub_cache, library_caches
