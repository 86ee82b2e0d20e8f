"""One adapter per outside system, each satisfying a Protocol of `warmers/`.

Addresses, credentials, retries of single requests and file formats live here; decisions do not.
"""
