"""Files of tensors: headers, byte ranges, reading and writing tensor by tensor."""
