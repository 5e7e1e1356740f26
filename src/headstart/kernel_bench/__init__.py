"""Times the native kernels against the machine's own peaks: `python -m headstart.kernel_bench MODEL THREADS`.

The measuring half of `headstart bench --kernels`, a process of its own since it imports torch. Must not know requests,
schedulers or servers.
"""
