"""The checkpoint's own format: manifest, boxes, checksums, folders, files of tensors."""
