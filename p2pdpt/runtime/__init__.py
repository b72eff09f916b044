"""Do: the asyncio half, which creates tasks and opens sockets."""
