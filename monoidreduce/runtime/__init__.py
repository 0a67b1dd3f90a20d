"""One call, from arguments to results: binding, the call cache, autograd, replay. Alone knows torch's dispatcher and Dynamo."""
