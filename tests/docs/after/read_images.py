images = Images()
images.keys, images.store = [f"{number:02}" for number in range(10)], Store()
read = [value for batch in headrace.DataLoader(images, batch_size=5, seed=0) for value in batch.tolist()]
assert images.store.asked == 2
assert np.array(read).astype(int).tolist() == [list(key.encode()) for key in images.keys]
