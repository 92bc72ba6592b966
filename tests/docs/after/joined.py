assert ray.is_initialized()
assert headrace.DataLoader(range(8), num_workers=1, executor=executor).executor is executor
