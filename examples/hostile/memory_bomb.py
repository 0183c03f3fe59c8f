"""Takes memory and uses it until someone says stop."""

taken = []
while True:
    taken.append(bytearray(b"x" * (16 << 20)))
    print(f"{16 * len(taken)} MiB", flush=True)
