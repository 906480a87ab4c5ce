// When a loop over rows is worth more than one thread.
#pragma once

constexpr long kSerial = 1 << 15;  // elements; fewer take less time than waking a second thread
