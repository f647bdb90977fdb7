"""Messages in a stream of bytes: four bytes of length, then a msgpack document."""

import msgspec

LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def to_frame(message: object) -> bytes:
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(frame)


class FrameReader:
    """Cuts a stream of bytes, arriving in any parts, into the frames it is made of."""

    def __init__(self) -> None:
        self.unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that these bytes complete, without their lengths."""
        self.unread += data
        return self.take()

    def take(self) -> list[bytes]:
        """The complete frames of what is unread."""
        frames = []
        begin = 0
        while (start := begin + LENGTH_BYTES) <= len(self.unread):
            end = start + int.from_bytes(self.unread[begin:start], "big")
            if end > len(self.unread):
                break
            frames.append(bytes(self.unread[start:end]))
            begin = end
        del self.unread[:begin]
        return frames
