assert len(torch.cat(list(train))) == len(train_set)
assert len(torch.cat(list(evaluation))) == len(test_set)
