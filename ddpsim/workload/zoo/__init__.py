"""A captured model, of the zoo or a user's own: what its file says, and what its operators take.

- `table`: parameters, buffers, batch norms, the sizes that it allows
- `step`: its rows of operators at a batch and a size
- `law`, `gpu_time`: how long an operator takes
"""
