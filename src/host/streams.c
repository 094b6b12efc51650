/* SPDX-License-Identifier: Apache-2.0 */
/*
** streams.c: standard streams as the rest of the program expects them, whatever it was started with.
*/
#include "host/host.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

/* One that is closed would be the next file to be opened, and what is printed would be written into that: an adapter.
   In its place comes a file that can neither be read as input nor written as output, so that both still fail. */
static void fill(int fd)
{
    if (fcntl(fd, F_GETFD) != -1)
        return;
    int got = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    if (got != -1 && got != fd) /* a lower one could not be filled */
        close(got);
}

void host_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        fill(fd);
    /* A parent that ignores it leaves that to its children, who would go on for nobody. */
    signal(SIGPIPE, SIG_DFL);
    /* a log that may not grow is no reason to lose the run: writes fail instead */
    signal(SIGXFSZ, SIG_IGN);
}
