#include <endian.h>
#include <stddef.h>
#include <infiniband/verbs.h>

enum { LIST, CONTEXT, DOMAIN, PARENT_DOMAIN, MR, CHANNEL, CQ, QP, WQ, TABLE, RSS_QP, ENCAP, KINDS };
/* Marks in fields that nobody else uses. */
enum { PARENT = 0xdad, RSS = 0xff };

struct stand_in_provider {
	void (*open)(struct verbs_context *);
	void (*close)(struct ibv_context *);
	struct ibv_cq *(*create_cq)(struct ibv_context *, int);
	void (*destroy_cq)(struct ibv_cq *);
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	void (*destroy_qp)(struct ibv_qp *);
	/* Of queue pairs, if not raw ones. */
	enum ibv_qp_type type;
};

void stand_in_register(const struct stand_in_provider *);
void stand_in_wrong(const char *);
void stand_in_count(int kind, int by);
int stand_in_failure(const char *);
