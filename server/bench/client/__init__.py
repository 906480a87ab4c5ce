"""The HTTP client of the measurement: streams over asyncio, timed as their bytes arrive."""
