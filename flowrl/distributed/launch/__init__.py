"""Worker processes: placed and started by a launcher, called through a `Remote`, ended whatever happens.

The same worker classes run in the calling process (`inline`), in spawned processes (`spawn`) and on Ray (`ray`).
"""
