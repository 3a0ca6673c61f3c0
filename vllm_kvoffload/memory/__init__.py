"""Host memory of this machine: how much is still available, and segments that processes share.

Owns `limits` (machine, cgroup, /dev/shm) and `segment` (reserved shared memory, its name and its removal).
Knows nothing about the contents: the host pool (`sparse`) and the local store (`store`) define them.
"""
