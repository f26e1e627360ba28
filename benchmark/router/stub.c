/* A worker that costs next to nothing: answers any POST at once, or streams events.
 *
 *   stub PORT[,PORT...] once BYTES          JSON answer with a body of BYTES
 *   stub PORT[,PORT...] sse CHUNKS GAP_MS   CHUNKS events, GAP_MS apart, 200 bytes each
 *
 * Each event carries the time it was sent (CLOCK_MONOTONIC, nanoseconds) so that the
 * load generator can tell how long it took. One thread, epoll, keep-alive.
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
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { HEAD, LENGTH, CHUNKED };

struct conn {
    int fd, state, is_post, events_left, next;
    long left;          /* body bytes still to come */
    uint64_t due_ns;    /* when the next event is due */
    char head[16384];
    int head_len;
    char tail[8];       /* last bytes of a chunked body */
};

static char answer[4 * 1024 * 1024];
static int answer_len, streaming, events, gap_ms, epoll_fd;
static struct conn *streams[65536];
static int stream_count;
static const char control[] = "{\"object\":\"list\",\"data\":[{\"id\":\"stub\"}],"
                              "\"model_path\":\"stub\",\"status\":\"ok\"}";

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void put(struct conn *c, const char *data, int len) {
    while (len > 0) {
        int n = send(c->fd, data, len, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return;
            usleep(50);
            continue;
        }
        data += n;
        len -= n;
    }
}

static void send_event(struct conn *c) {
    char event[256];
    int n = snprintf(event, sizeof event, "c8\r\ndata: {\"t\":%020llu,\"pad\":\"",
                     (unsigned long long)now_ns());
    memset(event + n, 'x', sizeof event - n);
    memcpy(event + 4 + 200 - 4, "\"}\n\n", 4);
    memcpy(event + 204, "\r\n", 2);
    put(c, event, 206);
}

static void drop_stream(struct conn *c) {
    for (int i = 0; i < stream_count; i++)
        if (streams[i] == c) {
            streams[i] = streams[--stream_count];
            return;
        }
}

static void respond(struct conn *c) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    char buffer[512];
    if (!c->is_post || strstr(c->head, " /health") || strstr(c->head, "/flush_cache")) {
        int n = snprintf(buffer, sizeof buffer,
                         "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                         "Content-Length: %zu\r\n\r\n%s", sizeof control - 1, control);
        put(c, buffer, n);
    } else if (!streaming) {
        put(c, answer, answer_len);
    } else {
        put(c, head, sizeof head - 1);
        c->events_left = events;
        c->due_ns = now_ns();
        streams[stream_count++] = c;
    }
}

static void begin(struct conn *c, char *end) {
    char *length;
    *end = 0;
    c->is_post = !strncmp(c->head, "POST", 4);
    if ((length = strcasestr(c->head, "\r\ncontent-length:"))) {
        c->left = atol(length + 17);
        c->state = LENGTH;
    } else if (strcasestr(c->head, "\r\ntransfer-encoding:")) {
        c->state = CHUNKED;
        memset(c->tail, 0, sizeof c->tail);
    } else {
        c->left = 0;
        c->state = LENGTH;
    }
}

/* Take bytes of a request; 1 when the request is whole. */
static int body(struct conn *c, char *data, int len) {
    if (c->state == LENGTH) {
        c->left -= len;
        return c->left <= 0;
    }
    int keep = len < 5 ? len : 5;
    memmove(c->tail, c->tail + keep, 5 - keep);
    memcpy(c->tail + 5 - keep, data + len - keep, keep);
    return !memcmp(c->tail, "0\r\n\r\n", 5);
}

static void readable(struct conn *c) {
    static char buffer[1 << 18];
    int n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        drop_stream(c);
        close(c->fd);
        free(c);
        return;
    }
    int whole;
    if (c->state == HEAD) {
        int take = n < (int)sizeof c->head - 1 - c->head_len
                       ? n : (int)sizeof c->head - 1 - c->head_len;
        memcpy(c->head + c->head_len, buffer, take);
        c->head[c->head_len + take] = 0;
        char *end = strstr(c->head, "\r\n\r\n");
        if (!end) {
            c->head_len += take;
            return;
        }
        int used = end + 4 - c->head - c->head_len;
        begin(c, end + 2);
        whole = n > used ? body(c, buffer + used, n - used)
                         : c->state == LENGTH && c->left == 0;
    } else {
        whole = body(c, buffer, n);
    }
    if (whole) {
        c->state = HEAD;
        c->head_len = 0;
        respond(c);
    }
}

static void tick(void) {
    uint64_t now = now_ns();
    for (int i = 0; i < stream_count; i++) {
        struct conn *c = streams[i];
        if (c->due_ns > now) continue;
        if (c->events_left-- > 0) {
            send_event(c);
            c->due_ns += gap_ms * 1000000ull;
        } else {
            put(c, "0\r\n\r\n", 5);
            streams[i--] = streams[--stream_count];
        }
    }
}

static int listener(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&a, sizeof a) || listen(fd, 4096)) {
        perror("stub: listen");
        exit(2);
    }
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: stub PORT[,PORT...] once BYTES | sse CHUNKS GAP_MS\n");
        return 2;
    }
    streaming = !strcmp(argv[2], "sse");
    if (streaming) {
        events = atoi(argv[3]);
        gap_ms = atoi(argv[4]);
    } else {
        int bytes = atoi(argv[3]);
        answer_len = sprintf(answer, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                                     "Content-Length: %d\r\n\r\n", bytes);
        memset(answer + answer_len, ' ', bytes);
        memcpy(answer + answer_len, "{\"choices\":[]", 13);
        answer[answer_len + bytes - 1] = '}';
        answer_len += bytes;
    }
    epoll_fd = epoll_create1(0);
    int listeners[64], count = 0;
    for (char *port = strtok(argv[1], ","); port; port = strtok(NULL, ","))
        listeners[count++] = listener(atoi(port));
    for (int i = 0; i < count; i++) {
        struct epoll_event e = {.events = EPOLLIN, .data.u64 = i};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listeners[i], &e);
    }
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec every = {{0, 500000}, {0, 500000}};
    if (streaming) timerfd_settime(timer, 0, &every, NULL);
    struct epoll_event te = {.events = EPOLLIN, .data.u64 = 1000};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &te);
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct epoll_event ready[256];
        int n = epoll_wait(epoll_fd, ready, 256, -1);
        for (int i = 0; i < n; i++) {
            uint64_t id = ready[i].data.u64;
            if (id == 1000) {
                uint64_t ticks;
                if (read(timer, &ticks, 8) == 8) tick();
            } else if (id < (uint64_t)count) {
                int fd = accept4(listeners[id], NULL, NULL, SOCK_NONBLOCK), one = 1;
                if (fd < 0) continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                struct conn *c = calloc(1, sizeof *c);
                c->fd = fd;
                struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
                epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
            } else {
                readable(ready[i].data.ptr);
            }
        }
    }
}
