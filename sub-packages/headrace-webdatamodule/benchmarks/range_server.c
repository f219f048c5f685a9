/* A web server for benchmarks: files of a folder, whole or by ranges, after a latency and at a limited rate.
 *
 *     cc -O2 -pthread -o range_server range_server.c
 *     ./range_server FOLDER LATENCY_MS MB_PER_SECOND MB_PER_SECOND_OF_A_CONNECTION
 *
 * It prints its port, serves 127.0.0.1 alone, and ends with its standard input. For each line of that it prints the
 * requests that it has answered and the bytes of their bodies. A thread serves a connection. It takes so little of a
 * processor that what is measured beside it is the client.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 16384, PIECE = 65536 };

static const char *folder;
static double latency, all_rate, own_rate; /* seconds; bytes a second, 0 for no limit */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double all_free; /* when the shared line is free again */
static atomic_llong requests, bytes_sent;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void sleep_until(double moment) {
    struct timespec at = {(time_t)moment, (long)((moment - (double)(time_t)moment) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
    }
}

/* Take a place on the line for some bytes; returns when they may leave. */
static double reserved(double *line, double rate, long bytes) {
    double begin = now();
    if (rate <= 0) return begin;
    if (*line < begin) *line = begin;
    return *line += (double)bytes / rate;
}

static int send_all(int client, const char *data, size_t bytes, int flags) {
    while (bytes > 0) {
        ssize_t sent = send(client, data, bytes, flags | MSG_NOSIGNAL);
        if (sent <= 0) return -1;
        data += sent;
        bytes -= (size_t)sent;
    }
    return 0;
}

static int send_range(int client, int file, off_t at, off_t end, double *own_free) {
    while (at < end) {
        long bytes = end - at < PIECE ? (long)(end - at) : PIECE;
        pthread_mutex_lock(&lock);
        double free_at = reserved(&all_free, all_rate, bytes);
        pthread_mutex_unlock(&lock);
        double own = reserved(own_free, own_rate, bytes);
        if (own > free_at) free_at = own;
        if (free_at > now() + 5e-4) sleep_until(free_at);
        for (long left = bytes; left > 0;) {
            ssize_t sent = sendfile(client, file, &at, (size_t)left);
            if (sent <= 0) return -1;
            left -= sent;
        }
    }
    return 0;
}

/* Answer one request, whose head is a text; -1 where the connection has to end. */
static int answer(int client, char *head, double *own_free) {
    double due = now() + latency;
    char method[8], name[1024], path[4096], line[512];
    if (sscanf(head, "%7s %1023s", method, name) != 2 || strstr(name, "..")) return -1;
    name[strcspn(name, "?")] = 0;
    snprintf(path, sizeof path, "%s%s", folder, name);
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) || !S_ISREG(status.st_mode)) {
        if (file >= 0) close(file);
        sleep_until(due);
        static const char none[] = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        return send_all(client, none, sizeof none - 1, 0);
    }
    long long first = 0, last = status.st_size - 1;
    char *range = strcasestr(head, "\r\nrange: bytes=");
    int partial = range && sscanf(range + 15, "%lld-%lld", &first, &last) >= 1;
    if (last > status.st_size - 1) last = status.st_size - 1;
    int bytes = snprintf(line, sizeof line,
                         "HTTP/1.1 %s\r\nContent-Length: %lld\r\nAccept-Ranges: bytes\r\n"
                         "Content-Type: application/octet-stream\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n",
                         partial ? "206 Partial Content" : "200 OK", last - first + 1);
    if (partial)
        bytes += snprintf(line + bytes, sizeof line - (size_t)bytes, "Content-Range: bytes %lld-%lld/%lld\r\n", first,
                          last, (long long)status.st_size);
    bytes += snprintf(line + bytes, sizeof line - (size_t)bytes, "\r\n");
    sleep_until(due);
    int body = strcmp(method, "HEAD") != 0 && last >= first;
    int failed = send_all(client, line, (size_t)bytes, body ? MSG_MORE : 0);
    if (!failed && body) failed = send_range(client, file, first, last + 1, own_free);
    requests++;
    bytes_sent += body ? last - first + 1 : 0;
    close(file);
    return failed;
}

static void *serve(void *argument) {
    int client = (int)(long)argument, on = 1;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    char *head = malloc(HEAD), *end;
    size_t have = 0;
    double own_free = 0;
    for (head[0] = 0;;) {
        while (!(end = strstr(head, "\r\n\r\n"))) {
            ssize_t came = have < HEAD - 1 ? read(client, head + have, HEAD - 1 - have) : 0;
            if (came <= 0) goto done;
            have += (size_t)came;
            head[have] = 0;
        }
        end[2] = 0;
        size_t used = (size_t)(end + 4 - head);
        if (answer(client, head, &own_free)) break;
        memmove(head, head + used, have - used + 1);
        have -= used;
    }
done:
    free(head);
    close(client);
    return NULL;
}

static void *end_with_input(void *unused) {
    char byte;
    while (read(0, &byte, 1) > 0) {
        printf("%lld %lld\n", (long long)requests, (long long)bytes_sent);
        fflush(stdout);
    }
    (void)unused;
    _exit(0);
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    folder = arguments[1];
    latency = atof(arguments[2]) / 1e3;
    all_rate = atof(arguments[3]) * 1e6;
    own_rate = atof(arguments[4]) * 1e6;
    signal(SIGPIPE, SIG_IGN);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    if (bind(server, (struct sockaddr *)&at, size) || listen(server, 1024) ||
        getsockname(server, (struct sockaddr *)&at, &size))
        return 1;
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 17);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    pthread_create(&thread, &small, end_with_input, NULL);
    for (;;) {
        int client = accept4(server, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0 && pthread_create(&thread, &small, serve, (void *)(long)client)) close(client);
    }
}
