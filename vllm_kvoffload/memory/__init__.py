"""Host memory of this machine: how much may still be taken, and segments of it that processes share.

Owns `limits` (machine, cgroup, /dev/shm) and `segment` (a reserved piece of shared memory, its name and its
end). Knows nothing of what is put there: the host pool (`sparse`) and the local store (`store`) use it.
"""
