assert torch.equal(torch.cat(trained), kept)
