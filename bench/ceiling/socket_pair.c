/* The ceiling of the tcp transport: two processes, one TCP connection, and nothing that is not needed.
 *
 * A request is one header, `count` offsets of 8 bytes, and for WRITE the payloads; the answer is 8 bytes for WRITE
 * and the payloads for READ. Both sockets use cubic, which loopback likes better than a pacing congestion control,
 * and TCP_NODELAY. There are no checks, keys, deadlines or lanes. With `spin_ns` > 0 a receiver polls and yields for
 * that long before it blocks (waking a halted CPU costs more than a small transfer).
 *
 * All functions return 0 or -errno. Native byte order: both ends are this file on one machine. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "job.h"

enum { READ_OPERATION = 1, WRITE_OPERATION = 2, MAXIMUM_COUNT = 256 };

struct request {
  uint32_t operation;
  uint32_t count;
  uint64_t block_bytes;
  uint64_t first_offset; /* the other count - 1 offsets follow */
};

static ssize_t receive_some(int fd, struct msghdr *message, uint64_t spin_ns) {
  uint64_t give_up = spin_ns ? now_ns() + spin_ns : 0;
  for (;;) {
    int flags = spin_ns ? MSG_DONTWAIT : MSG_WAITALL;
    ssize_t received = recvmsg(fd, message, flags);
    if (received >= 0) return received;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -1;
    if (now_ns() > give_up)
      spin_ns = 0;
    else
      sched_yield();
  }
}

static void advance(struct iovec **vector, size_t *count, size_t moved) {
  while (*count && moved >= (*vector)->iov_len) {
    moved -= (*vector)->iov_len;
    (*vector)++;
    (*count)--;
  }
  if (*count) {
    (*vector)->iov_base = (char *)(*vector)->iov_base + moved;
    (*vector)->iov_len -= moved;
  }
}

static int receive_all(int fd, struct iovec *vector, size_t count, uint64_t spin_ns) {
  while (count) {
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = count};
    ssize_t received = receive_some(fd, &message, spin_ns);
    if (received <= 0) return received ? -errno : -ECONNRESET;
    advance(&vector, &count, (size_t)received);
  }
  return 0;
}

static int send_all(int fd, struct iovec *vector, size_t count) {
  while (count) {
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = count};
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return -errno;
    advance(&vector, &count, (size_t)sent);
  }
  return 0;
}

static int tune(int fd) {
  int one = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one)) return -errno;
  /* A kernel without cubic keeps its default: the ceiling is then that of the machine as it is. */
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
  return 0;
}

/* Listens on a free port of the loopback address; returns the descriptor and stores the port. */
int socket_listen(uint16_t *port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  if (tune(fd) || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1) ||
      getsockname(fd, (struct sockaddr *)&address, &length)) {
    int error = -errno;
    close(fd);
    return error;
  }
  *port = ntohs(address.sin_port);
  return fd;
}

int socket_connect(uint16_t port) {
  struct sockaddr_in address = {
      .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  if (tune(fd) || connect(fd, (struct sockaddr *)&address, sizeof address)) {
    int error = -errno;
    close(fd);
    return error;
  }
  return fd;
}

static int serve_one(int fd, char *base, uint64_t size_bytes, uint64_t spin_ns) {
  struct request request;
  uint64_t offsets[MAXIMUM_COUNT];
  struct iovec vector[MAXIMUM_COUNT];
  struct iovec head = {&request, sizeof request};
  int error = receive_all(fd, &head, 1, spin_ns);
  if (error) return error;
  if (request.count == 0 || request.count > MAXIMUM_COUNT) return -EPROTO;
  offsets[0] = request.first_offset;
  if (request.count > 1) {
    struct iovec rest = {offsets + 1, (request.count - 1) * sizeof(uint64_t)};
    if ((error = receive_all(fd, &rest, 1, spin_ns))) return error;
  }
  for (uint32_t i = 0; i < request.count; i++) {
    if (request.block_bytes > size_bytes || offsets[i] > size_bytes - request.block_bytes) return -EPROTO;
    vector[i] = (struct iovec){base + offsets[i], request.block_bytes};
  }
  if (request.operation == READ_OPERATION) return send_all(fd, vector, request.count);
  if ((error = receive_all(fd, vector, request.count, spin_ns))) return error;
  uint64_t done = request.count;
  struct iovec answer = {&done, sizeof done};
  return send_all(fd, &answer, 1);
}

/* Accepts one connection and serves it until the peer closes it; returns 0 then, or -errno. */
int socket_serve(int listener, char *base, uint64_t size_bytes, uint64_t spin_ns) {
  int fd = accept(listener, NULL, NULL);
  if (fd < 0) return -errno;
  int error = 0;
  while (!error) error = serve_one(fd, base, size_bytes, spin_ns);
  close(fd);
  return error == -ECONNRESET ? 0 : error;
}

static int transfer(int fd, const struct job *job, char *local, uint64_t start) {
  struct request request = {job->kind, job->count, job->block_bytes, start};
  uint64_t offsets[MAXIMUM_COUNT];
  struct iovec vector[2 + MAXIMUM_COUNT];
  struct iovec *payload = vector + 2;
  for (uint32_t i = 0; i < job->count; i++) {
    offsets[i] = start + i * job->block_bytes;
    payload[i] = (struct iovec){local + offsets[i], job->block_bytes};
  }
  vector[0] = (struct iovec){&request, sizeof request};
  vector[1] = (struct iovec){offsets + 1, (job->count - 1) * sizeof(uint64_t)};
  int error = send_all(fd, vector, job->kind == WRITE_OPERATION ? 2 + job->count : 2);
  if (error) return error;
  if (job->kind == READ_OPERATION) return receive_all(fd, payload, job->count, job->spin_ns);
  uint64_t done = 0;
  struct iovec answer = {&done, sizeof done};
  return receive_all(fd, &answer, 1, job->spin_ns);
}

/* Runs one job; `latencies_ns` receives one value per operation. */
int socket_run(int fd, const struct job *job, char *local, uint64_t *latencies_ns, struct outcome *outcome) {
  uint64_t step = job->count * job->block_bytes;
  if (job->count == 0 || job->count > MAXIMUM_COUNT || step == 0 || step > job->span_bytes) return -EINVAL;
  uint64_t positions = job->span_bytes / step;
  uint64_t started = now_ns(), before = started, done = 0;
  while (job_goes_on(job, done, before - started)) {
    int error = transfer(fd, job, local, done % positions * step);
    if (error) return error;
    uint64_t after = now_ns();
    latencies_ns[done++] = after - before;
    before = after;
  }
  *outcome = (struct outcome){done, before - started};
  return 0;
}
