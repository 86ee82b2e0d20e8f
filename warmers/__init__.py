"""The domain: what to warm, in which order, and how to tell that it is warm.

Nothing in here touches the network, a disk or a clock of its own: effects come in through Protocols
that `resources/` satisfies. No dagster, boto3, redis, pandas or pydantic import belongs here.
"""
