/* SPDX-License-Identifier: Apache-2.0
 *
 * The program `cuda-checkpoint` as CRIU's plug-in starts it, a dozen times while an engine stands still. It hands its
 * arguments to who holds the driver and says what comes back, in a millisecond; an interpreter takes twenty. Where
 * nobody answers it becomes cuda-checkpoint.py, which lies beside it and has all the rest: what a question and an
 * answer consist of, and what the arguments mean. It is asked for help first of all, and has that too.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { MESSAGE = 4096, PATIENCE_S = 150 }; /* the holder's own limits are shorter */

static const char USAGE[] =
    "usage: cuda-checkpoint --get-state --pid PID\n"
    "       cuda-checkpoint --get-restore-tid --pid PID\n"
    "       cuda-checkpoint --action lock|checkpoint|restore|unlock --pid PID [--timeout MS]\n"
    "       cuda-checkpoint --hold\n"
    "Needs the NVIDIA driver 570 or newer. -h, -p and -t are short for --help, --pid and --timeout.\n";

/* Write the question into `text`; return its length, 0 where it is too long. */
static size_t ask(char *text, int argc, char **argv) {
    const char *users = getenv("WARMHOLD_CUDA_PIDS");
    size_t length = (size_t)snprintf(text, MESSAGE, "%s", users ? users : "-");
    for (int i = 1; i < argc && length < MESSAGE; i++)
        length += (size_t)snprintf(text + length, MESSAGE - length, "\n%s", argv[i]);
    return length < MESSAGE ? length : 0;
}

/* Send `length` bytes of `text` to the socket and put the answer in their place; return its length, 0 where none came. */
static size_t talk(const char *path, char *text, size_t length) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = PATIENCE_S};
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t got = 0;
    ssize_t count = 0;
    if (connection < 0 || strlen(path) >= sizeof address.sun_path) return 0;
    strcpy(address.sun_path, path);
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(connection, (struct sockaddr *)&address, sizeof address) == 0 &&
        send(connection, text, length, MSG_NOSIGNAL) == (ssize_t)length && shutdown(connection, SHUT_WR) == 0)
        while (got < MESSAGE - 1 && (count = read(connection, text + got, MESSAGE - 1 - got)) > 0) got += (size_t)count;
    close(connection);
    text[got] = 0;
    return count == 0 ? got : 0;
}

int main(int argc, char **argv) {
    char text[MESSAGE], program[PATH_MAX], *said;
    const char *path = getenv("WARMHOLD_CUDA_SOCKET");
    if (argc < 2 || (argc == 2 && (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0)))
        return fputs(USAGE, stdout) < 0;
    size_t length = path && argc > 2 ? ask(text, argc, argv) : 0;
    if (length && talk(path, text, length)) {
        int code = (int)strtol(text, &said, 10);
        if (said != text && *said == ' ') {
            if (said[1]) fprintf(code ? stderr : stdout, "%s\n", said + 1);
            return code;
        }
    }
    ssize_t count = readlink("/proc/self/exe", program, sizeof program - 4);
    if (count > 0) {
        strcpy(program + count, ".py");
        argv[0] = program;
        execv(program, argv);
    }
    perror("cuda-checkpoint.py");
    return 2;
}
