/* The limit of a Unix packet socket: send, receive and both time stamps in C, nothing decoded.
 *
 * Built at run time with `cc -O2 -shared -fPIC` and called through ctypes. Every packet begins
 * with its index, an unsigned 64-bit number, and stamps are nanoseconds of CLOCK_MONOTONIC.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define PACKET_BYTES (64 << 10)

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* One packet to every socket; 0, or the errno of the first that failed. */
int seqpacket_send(const int *sockets, int count, const void *packet, size_t bytes,
                   int64_t *began, int64_t *ended)
{
    *began = now_ns();
    for (int i = 0; i < count; i++)
        if (send(sockets[i], packet, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
            return errno ? errno : EIO;
    *ended = now_ns();
    return 0;
}

/* Packets first .. first + count - 1, each stamped in arrived[index].
 *
 * spin: poll without ever yielding the core; otherwise block in the kernel.
 * Returns how many carried another index than expected, or -errno.
 */
int64_t seqpacket_receive(int socket, int spin, int64_t first, int64_t count, int64_t *arrived,
                          int64_t give_up_ns)
{
    static unsigned char packet[PACKET_BYTES];
    int64_t wrong = 0;
    for (int64_t i = first; i < first + count; i++) {
        ssize_t got;
        unsigned misses = 0;
        while ((got = recv(socket, packet, sizeof packet, spin ? MSG_DONTWAIT : 0)) < 0) {
            if (errno != EAGAIN && errno != EINTR)
                return -errno;
            if ((++misses & 0xfff) == 0 && now_ns() > give_up_ns)
                return -ETIMEDOUT;
        }
        arrived[i] = now_ns();
        uint64_t index = 0;
        if (got < (ssize_t)sizeof index)
            return -EPIPE;
        memcpy(&index, packet, sizeof index);
        wrong += index != (uint64_t)i;
    }
    return wrong;
}
