// How the cluster stands, in a state and a line: what the page says on top.
import { duration } from "./format.js";

export const standing = ({ router, redis, pools }) => {
  const away = redis?.away_s;
  if (away != null) return ["lost", `Redis is away for ${duration(away)}: workers are shown as last seen`];
  const { ready, workers } = pools.decode;
  if (ready === 0) return ["lost", `no decode worker is ready${workers ? ` (of ${workers})` : ""}: requests are refused`];
  return ["live", `live · up ${duration(router.uptime_s)}`];
};
