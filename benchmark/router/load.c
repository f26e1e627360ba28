/* Closed-loop load on one thread: every connection sends its next request as soon as
 * its answer is whole.
 *
 *   load PORT CONNECTIONS SECONDS BODY_BYTES [stream] [once]
 *
 * Prints one JSON line: requests, errors, chunks, seconds, latency and event delay in
 * microseconds (median and 99th percentile). "stream" asks for an event stream. With
 * "once" each connection sends a single request and keeps its connection; the run ends
 * when all are done or after SECONDS.
 * Every request carries one of 1,000 labels, and its body has up to 63 blanks more than
 * BODY_BYTES, so that lengths differ as they do in life.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct conn {
    int fd, in_body, chunked, head_len, writing;
    long left, sent, extra;
    int label;
    uint64_t start_ns;
    char head[16384];
    char tail[8];
};

#define MAX_EXTRA 64

static char *request, *label_at, *length_at;
static long request_len, body_bytes;
static int port, connections, once, epoll_fd, finished;
static long requests, errors, chunks;
static uint64_t seed = 88172645463325252ull;

#define SAMPLES 4000000
static uint32_t *latency, *delay;
static long latencies, delays;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void note(uint32_t *samples, long *count, uint64_t ns) {
    if (*count < SAMPLES) samples[(*count)++] = ns / 100; /* 0.1 us */
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double quantile(uint32_t *samples, long count, double share) {
    if (!count) return 0;
    long at = share * count;
    return samples[at < count ? at : count - 1] / 10.0;
}

static void watch(struct conn *c, int out) {
    struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void choose(struct conn *c) {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    c->label = seed % 1000;
    c->extra = (seed >> 32) % MAX_EXTRA;
}

/* The shared request with this connection's label and length in it. */
static char *prepared(struct conn *c) {
    char digits[24];
    snprintf(digits, sizeof digits, "%03d", c->label);
    memcpy(label_at, digits, 3);
    int width = snprintf(digits, sizeof digits, "%ld", body_bytes + c->extra);
    memcpy(length_at, digits, width);
    return request;
}

static void write_more(struct conn *c) {
    long len = request_len + c->extra;
    char *data = prepared(c);
    while (c->sent < len) {
        long n = send(c->fd, data + c->sent, len - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EAGAIN && !c->writing) { c->writing = 1; watch(c, 1); }
            return;
        }
        c->sent += n;
    }
    if (c->writing) { c->writing = 0; watch(c, 0); }
}

static void begin(struct conn *c) {
    c->sent = c->head_len = c->in_body = 0;
    choose(c);
    c->start_ns = now_ns();
    write_more(c);
}

static void open_connection(struct conn *c) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (void *)&a, sizeof a)) { perror("load: connect"); exit(2); }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
    c->writing = 0;
}

static void fail(struct conn *c) {
    errors++;
    close(c->fd);
    if (once) { finished++; return; }
    open_connection(c);
    begin(c);
}

static void events_in(char *data, int len) {
    uint64_t now = now_ns();
    for (char *at = data, *end = data + len; at < end;) {
        char *t = memmem(at, end - at, "{\"t\":", 5);
        if (!t || t + 25 > end) break;
        char digits[21];
        memcpy(digits, t + 5, 20);
        digits[20] = 0;
        chunks++;
        note(delay, &delays, now - strtoull(digits, NULL, 10));
        at = t + 25;
    }
}

static int whole(struct conn *c, char *data, int len) {
    if (!c->chunked) {
        c->left -= len;
        return c->left <= 0;
    }
    events_in(data, len);
    int keep = len < 5 ? len : 5;
    memmove(c->tail, c->tail + keep, 5 - keep);
    memcpy(c->tail + 5 - keep, data + len - keep, keep);
    return !memcmp(c->tail, "0\r\n\r\n", 5);
}

static void readable(struct conn *c) {
    static char buffer[1 << 18];
    int n = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        fail(c);
        return;
    }
    int done;
    if (!c->in_body) {
        int room = (int)sizeof c->head - 1 - c->head_len, take = n < room ? n : room;
        memcpy(c->head + c->head_len, buffer, take);
        c->head[c->head_len + take] = 0;
        char *end = strstr(c->head, "\r\n\r\n"), *length;
        if (!end) { c->head_len += take; return; }
        int used = end + 4 - c->head - c->head_len;
        end[2] = 0;
        if (strncmp(c->head, "HTTP/1.1 200", 12)) errors++;
        c->in_body = 1;
        length = strcasestr(c->head, "\r\ncontent-length:");
        c->chunked = !length;
        c->left = length ? atol(length + 17) : 0;
        memset(c->tail, 0, sizeof c->tail);
        done = n > used ? whole(c, buffer + used, n - used) : !c->chunked && !c->left;
    } else {
        done = whole(c, buffer, n);
    }
    if (done) {
        requests++;
        note(latency, &latencies, now_ns() - c->start_ns);
        if (once) finished++;
        else begin(c);
    }
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS BODY_BYTES [stream] [once]\n");
        return 2;
    }
    struct rlimit limit = {65536, 65536};
    setrlimit(RLIMIT_NOFILE, &limit);
    port = atoi(argv[1]);
    connections = atoi(argv[2]);
    double seconds = atof(argv[3]);
    body_bytes = atol(argv[4]);
    const char *stream = "false";
    for (int i = 5; i < argc; i++) {
        if (!strcmp(argv[i], "once")) once = 1;
        if (!strcmp(argv[i], "stream")) stream = "true";
    }
    char start[128];
    int start_len = snprintf(start, sizeof start, "{\"model\":\"stub\",\"stream\":%s,"
                             "\"messages\":[{\"role\":\"user\",\"content\":\"", stream);
    static const char end[] = "\"}]}";
    if (body_bytes < 200) body_bytes = 200;
    if (snprintf(NULL, 0, "%ld", body_bytes) !=
        snprintf(NULL, 0, "%ld", body_bytes + MAX_EXTRA - 1)) {
        fprintf(stderr, "load: BODY_BYTES and 63 more must have as many digits\n");
        return 2;
    }
    request = malloc(body_bytes + 1024 + MAX_EXTRA);
    request_len = sprintf(request,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        "Content-Type: application/json\r\nAccept: */*\r\n"
        "User-Agent: load\r\nAuthorization: Bearer none\r\n"
        "x-smg-routing-key: label-000\r\nContent-Length: %ld\r\n\r\n", body_bytes);
    memset(request + request_len, 'y', body_bytes);
    memcpy(request + request_len, start, start_len);
    memcpy(request + request_len + body_bytes - (sizeof end - 1), end, sizeof end - 1);
    label_at = strstr(request, "label-") + 6;
    length_at = strstr(request, "Content-Length: ") + 16;
    request_len += body_bytes;
    memset(request + request_len, ' ', MAX_EXTRA);
    latency = malloc(SAMPLES * sizeof *latency);
    delay = malloc(SAMPLES * sizeof *delay);
    epoll_fd = epoll_create1(0);
    struct conn *conns = calloc(connections, sizeof *conns);
    for (int i = 0; i < connections; i++) open_connection(&conns[i]);
    uint64_t started = now_ns(), stop = started + seconds * 1e9;
    for (int i = 0; i < connections; i++) begin(&conns[i]);
    while (now_ns() < stop && !(once && finished == connections)) {
        struct epoll_event ready[256];
        int n = epoll_wait(epoll_fd, ready, 256, 50);
        for (int i = 0; i < n; i++) {
            struct conn *c = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT) write_more(c);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
    }
    double took = (now_ns() - started) / 1e9;
    qsort(latency, latencies, sizeof *latency, by_value);
    qsort(delay, delays, sizeof *delay, by_value);
    printf("{\"requests\":%ld,\"errors\":%ld,\"chunks\":%ld,\"seconds\":%.4f,"
           "\"latency_us\":[%.1f,%.1f],\"event_delay_us\":[%.1f,%.1f]}\n",
           requests, errors, chunks, took, quantile(latency, latencies, 0.5),
           quantile(latency, latencies, 0.99), quantile(delay, delays, 0.5),
           quantile(delay, delays, 0.99));
    return 0;
}
