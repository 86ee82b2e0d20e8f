"""The story of the product, a module a chapter: prompts, then cache.

Each asset reads its inputs, makes one domain call and reports. Decisions belong in `warmers/`, addresses and
file formats in `resources/`, jobs and schedules in `pipelines/`.
"""
