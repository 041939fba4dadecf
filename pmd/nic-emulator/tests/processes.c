/*
 * Events and processes: completion channels, asynchronous events, a port that the kernel holds, and a reset. A second
 * process rings doorbells of queues in shared memory, and a third one is killed while it does. The topology contains
 * a fault: the second create_qp fails with EBUSY.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <infiniband/manadv.h>
#include <infiniband/verbs.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: failed: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
			exit(1); \
		} \
	} while (0)

/* One memory region for all objects, shared with the second process. */
#define SIZE (1 << 20)
static uint8_t *region;
static size_t used = 65536;

static void *allocate(size_t size, void *data)
{
	void *memory = region + used;
	(void)data;
	used += (size + 4095) & ~4095ul;
	CHECK(used <= SIZE / 2);
	return memory;
}

static void release(void *memory, void *data)
{
	(void)memory;
	(void)data;
}

struct shared {
	uint32_t sq_id, sq_bytes, vport, cq_id, cq_count, key;
	uint64_t sq, cq, head, taken;
};

/* Polls at most `looks` times for the next completion. */
static bool take_one(struct shared *s, long looks)
{
	uint32_t *entry = (uint32_t *)(s->cq + s->taken % s->cq_count * 64);

	for (; __atomic_load_n(&entry[15], __ATOMIC_ACQUIRE) >> 29 != (s->taken / s->cq_count & 7); looks--) {
		if (looks == 0)
			return false;
		sched_yield();
	}
	CHECK((entry[0] & 0x3f) == 32);
	s->taken++;
	return true;
}

/* Sends a packet by direct access to the queue, in any process, and waits for its completion. */
static void send_one(struct shared *s, volatile uint64_t *page, uint8_t mark)
{
	uint32_t *wqe = (uint32_t *)(s->sq + (s->head * 32 & (s->sq_bytes - 1)));
	uint8_t *frame = region + SIZE / 2;

	memset(frame, mark, 64);
	*(uint64_t *)(wqe + 4) = (uintptr_t)frame;
	wqe[6] = s->key;
	wqe[7] = 64;
	wqe[2] = s->cq_id << 8;
	wqe[3] = (s->sq_id >> 10) << 10 | s->vport << 24;
	wqe[0] = 0;
	__atomic_store_n(&wqe[1], 1 | 2 << 8, __ATOMIC_RELEASE);
	s->head++;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	page[0] = s->head * 32 << 32 | s->sq_id;
	CHECK(take_one(s, 1000000000));
}

/* Continues the queue of a process that was killed while it sent, before or after the doorbell of its last packet. */
static void take_over(struct shared *s, volatile uint64_t *page)
{
	uint64_t sent = s->taken - s->cq_count;

	CHECK(sent == s->head || sent + 1 == s->head);
	if (sent != s->head && !take_one(s, 100000)) {
		page[0] = s->head * 32 << 32 | s->sq_id;
		CHECK(take_one(s, 1000000000));
	}
}

static void pass(int socket, int fd)
{
	char byte = 1, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1,
		.msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(fd));
	CHECK(sendmsg(socket, &message, 0) == 1);
}

static int take(int socket)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1,
		.msg_control = control, .msg_controllen = sizeof(control) };
	int fd;
	CHECK(recvmsg(socket, &message, 0) == 1);
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
	return fd;
}

/* The second process: a separate program that receives only two file descriptors. */
static int secondary(int socket, bool forever)
{
	int memory = take(socket), device = take(socket), i;
	uint64_t where;
	volatile uint64_t *page;

	CHECK(read(socket, &where, 8) == 8);
	/* The address is the same, because descriptors and rings contain it. */
	region = mmap((void *)where, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, memory, 0);
	CHECK(region == (void *)where);
	page = mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, device, 0);
	CHECK(page != MAP_FAILED);
	close(device);
	for (i = 0; forever || i < 100; i = forever ? 0 : i + 1)
		send_one((struct shared *)region, page, 100 + i);
	return 0;
}

/* Starts it with the device's file and the memory. */
static pid_t start(char *program, const char *role, int memory, int device)
{
	int pair[2];
	char number[16];
	pid_t child;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		snprintf(number, sizeof(number), "%d", pair[1]);
		close(pair[0]);
		execl("/proc/self/exe", program, role, number, NULL);
		_exit(9);
	}
	close(pair[1]);
	pass(pair[0], memory);
	pass(pair[0], device);
	CHECK(write(pair[0], &region, 8) == 8);
	close(pair[0]);
	return child;
}

static void wait_readable(int fd)
{
	struct pollfd waits = { .fd = fd, .events = POLLIN };
	CHECK(poll(&waits, 1, 30000) == 1);
}

static bool quiet(int fd)
{
	struct pollfd waits = { .fd = fd, .events = POLLIN };
	return poll(&waits, 1, 0) == 0;
}

int main(int count, char **arguments)
{
	struct ibv_parent_domain_init_attr parent_attr = {
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, .pd_context = (void *)1 };
	struct manadv_ctx_allocators allocators = { allocate, release, NULL };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 64, .max_send_sge = 1, .max_recv_wr = 1, .max_recv_sge = 1 } };
	struct ibv_device **devices;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq, *event_cq;
	struct ibv_qp *qp;
	struct ibv_async_event event;
	struct manadv_qp out_qp;
	struct manadv_cq out_cq;
	struct manadv_obj object;
	struct shared *shared;
	volatile uint64_t *page;
	void *cq_context;
	int memory, status, i;
	uint64_t sent;
	pid_t child;
	/* In scan mode the device does not see that a completion queue is armed. */
	const char *way = getenv("WIREPATH_NIC_DOORBELLS");
	bool scan = way && strcmp(way, "scan") == 0;

	if (count > 2)
		return secondary(atoi(arguments[2]), strcmp(arguments[1], "forever") == 0);
	memory = memfd_create("queues", 0);
	CHECK(memory >= 0 && ftruncate(memory, SIZE) == 0);
	region = mmap((void *)0x100000000000, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, memory, 0);
	CHECK(region == (void *)0x100000000000);
	shared = (struct shared *)region;

	devices = ibv_get_device_list(NULL);
	CHECK(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	CHECK(manadv_set_context_attr(context, MANADV_CTX_ATTR_BUF_ALLOCATORS, &allocators) == 0);
	pd = ibv_alloc_pd(context);
	parent_attr.pd = pd;
	pd = ibv_alloc_parent_domain(context, &parent_attr);
	mr = ibv_reg_mr(parent_attr.pd, region, SIZE, IBV_ACCESS_LOCAL_WRITE);
	channel = ibv_create_comp_channel(context);
	cq = ibv_create_cq(context, 64, (void *)0x1234, channel, 0);
	CHECK(pd && mr && channel && cq);
	attr.send_cq = attr.recv_cq = cq;
	qp = ibv_create_qp(pd, &attr);
	CHECK(qp);
	object.qp.in = qp;
	object.qp.out = &out_qp;
	object.cq.in = cq;
	object.cq.out = &out_cq;
	CHECK(manadv_init_obj(&object, MANADV_OBJ_QP | MANADV_OBJ_CQ) == 0);
	page = out_qp.db_page;
	*shared = (struct shared){
		.sq_id = out_qp.sq_id, .sq_bytes = out_qp.sq_size, .vport = out_qp.tx_vp_offset, .cq_id = out_cq.cq_id,
		.cq_count = out_cq.count, .key = mr->lkey, .sq = (uintptr_t)out_qp.sq_buf,
		.cq = (uintptr_t)out_cq.buf, .taken = out_cq.count };

	/* An armed completion queue reports one completion, and no other until it is armed again. */
	if (!scan) {
		page[0x800 / 8] = shared->taken << 32 | 0ull << 63 | shared->cq_id;
		send_one(shared, page, 1);
		CHECK(quiet(channel->fd));
		page[0x800 / 8] = shared->taken << 32 | 1ull << 63 | shared->cq_id;
		CHECK(quiet(channel->fd));
		send_one(shared, page, 2);
		send_one(shared, page, 3);
		wait_readable(channel->fd);
		CHECK(ibv_get_cq_event(channel, &event_cq, &cq_context) == 0 && event_cq == cq && cq_context == (void *)0x1234);
		CHECK(quiet(channel->fd));
		/* Completions that exist already raise an event at once. This event is never read. */
		page[0x800 / 8] = (shared->taken - 1) << 32 | 1ull << 63 | shared->cq_id;
		wait_readable(channel->fd);
	}

	/* A child may not use its parent's device, but can open it again. */
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct ibv_device_attr device;
		context = ibv_open_device(devices[0]);
		CHECK(context && ibv_query_device(context, &device) == 0 && ibv_alloc_pd(context));
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	send_one(shared, page, 4);

	/* A second process. */
	child = start(arguments[0], "secondary", memory, context->cmd_fd);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	/* The first process continues where the second one has stopped. */
	for (i = 0; i < 10; i++)
		send_one(shared, page, 200 + i);
	/* A process that is killed while it sends. In scan mode its last descriptor may be processed without a doorbell. */
	for (i = 0; !scan && i < 3; i++) {
		sent = shared->head;
		child = start(arguments[0], "forever", memory, context->cmd_fd);
		while (__atomic_load_n(&shared->head, __ATOMIC_RELAXED) < sent + 500) {
			CHECK(waitpid(child, &status, WNOHANG) == 0);
			sched_yield();
		}
		CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
		take_over(shared, page);
		send_one(shared, page, 210 + i);
	}

	/* The unread event is removed. The destruction waits until the other one is acknowledged. */
	CHECK(ibv_destroy_qp(qp) == 0);
	if (!scan)
		ibv_ack_cq_events(cq, 1);
	CHECK(ibv_destroy_cq(cq) == 0);
	CHECK(quiet(channel->fd));
	CHECK(ibv_destroy_comp_channel(channel) == 0);

	/* Refused once by the injected fault. */
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	attr.send_cq = attr.recv_cq = cq;
	CHECK(!ibv_create_qp(pd, &attr) && errno == EBUSY);
	qp = ibv_create_qp(pd, &attr);
	CHECK(qp);
	if (count > 1) { /* address of the control socket */
		struct sockaddr_un address = { .sun_family = AF_UNIX };
		static const char *const faults[] = { "kind = 'port-down'", "kind = 'port-up'", "kind = 'device-fatal'" };
		static const enum ibv_event_type types[] = { IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_DEVICE_FATAL };
		struct ibv_port_attr port;
		strcpy(address.sun_path, arguments[1]);
		for (i = 0; i < 3; i++) {
			int control = socket(AF_UNIX, SOCK_STREAM, 0);
			CHECK(connect(control, (struct sockaddr *)&address, sizeof(address)) == 0);
			CHECK(write(control, faults[i], strlen(faults[i])) > 0 && shutdown(control, SHUT_WR) == 0);
			wait_readable(context->async_fd);
			CHECK(ibv_get_async_event(context, &event) == 0 && event.event_type == types[i]);
			if (i < 2)
				CHECK(event.element.port_num == 1 && ibv_query_port(context, 1, &port) == 0 &&
				      port.state == (i == 0 ? IBV_PORT_DOWN : IBV_PORT_ACTIVE));
			ibv_ack_async_event(&event);
			close(control);
		}
		CHECK(!ibv_alloc_pd(context) && errno == EIO);
		/* A device that was reset works again after it is opened again. */
		CHECK(ibv_close_device(context) == 0);
		context = ibv_open_device(devices[0]);
		CHECK(context && ibv_alloc_pd(context));
	}
	ibv_free_device_list(devices);
	printf("all good\n");
	return 0;
}
